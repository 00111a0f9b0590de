"""Serve a model, and ask it with OpenAI's client."""

import threading

import uvicorn
from openai import OpenAI

import maxjax
from maxjax.serving import app

engine = maxjax.Engine(*maxjax.load("tiny"), slots=4)
server = uvicorn.Server(uvicorn.Config(app(engine, name="tiny"), port=8002, log_level="warning"))
thread = threading.Thread(target=server.run)
thread.start()

client = OpenAI(base_url="http://127.0.0.1:8002/v1", api_key="none")
messages = [{"role": "user", "content": "What is 37 + 48?"}]
answer = client.chat.completions.create(model="tiny", messages=messages, logprobs=True)
print(answer.choices[0].message.content, answer.usage.completion_tokens)

# Piece by piece, as it is written.
for chunk in client.chat.completions.create(model="tiny", messages=messages, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()

# An answer that matches a schema.
schema = {"enum": [{"sum": 85}, {"sum": 84}]}
form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
answer = client.chat.completions.create(model="tiny", messages=messages, response_format=form)
print(answer.choices[0].message.content)

server.should_exit = True
thread.join()
engine.close()
