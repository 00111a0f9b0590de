"""Pictures at addresses of a network: who may be asked, by way of whom, how long, and what may come."""

import asyncio
import io
import socket
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path

import pytest
from starlette.testclient import TestClient

import maxjax
from maxjax.errors import UserInputError
from maxjax.serving import fetch
from maxjax.serving.app import application
from maxjax.serving.errors import RequestError
from maxjax.serving.fetch import FetchLimits, PictureFetcher, is_public
from maxjax.serving.server import Server
from tests.engine.test_pictures import asked, picture, write_model

PEM = Path(__file__).with_name("a_example.pem")  # of the name a.example, valid until 2125
PICTURE = b"GIF89a" + bytes(100)


class Site(ThreadingHTTPServer):
    """A server at 127.0.0.1 that knows some paths."""

    daemon_threads = True

    def __init__(self, is_secure=False):
        self.asked, self.answers = [], {"/a.gif": (200, {}, PICTURE)}
        super().__init__(("127.0.0.1", 0), _Answer)
        if is_secure:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(PEM)
            self.socket = context.wrap_socket(self.socket, server_side=True)
        self.thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self.thread.start()

    def handle_error(self, request, address):
        pass  # a client that goes

    def url(self, path="/a.gif", host="127.0.0.1", scheme="http"):
        return f"{scheme}://{host}:{self.server_port}{path}"


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.asked.append((self.path, self.headers["host"]))
        status, headers, body = self.server.answers[self.path]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "content-length" not in headers and "transfer-encoding" not in headers:
            self.send_header("content-length", str(len(body)))
        self.end_headers()
        for piece in body if isinstance(body, list) else [body]:
            self.wfile.write(piece)
            self.wfile.flush()
            time.sleep(0.2 if isinstance(body, list) else 0)
        self.close_connection = True

    def log_message(self, *_):
        pass


def closed(site):
    site.shutdown()
    site.thread.join()
    site.server_close()


@pytest.fixture
def site():
    found = Site()
    yield found
    closed(found)


@pytest.fixture
def names(monkeypatch):
    """Names of hosts, and their addresses."""
    here = ["127.0.0.1"]
    known = {"a.example": here, "b.a.example": here, "two.example": [*here, "10.0.0.1"]}
    usual = socket.getaddrinfo

    def getaddrinfo(host, *args, **kwargs):
        if not host.endswith(".example"):
            return usual(host, *args, **kwargs)
        if host not in known:
            raise socket.gaierror("no such name")
        return [one for address in known[host] for one in usual(address, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def fetched(*urls, patterns=("*",), limits=None, public="127.0.0.1"):
    fetcher = PictureFetcher(patterns, limits, lambda one: one == ip_address(public))
    parts = [{"type": "image", "image": url} for url in urls]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
    found = asyncio.run(fetcher.filled(messages))
    assert messages[1]["content"] == parts and found[0] == messages[0]
    return [part["image"] for part in found[1]["content"]]


def refused(*args, **kwargs):
    with pytest.raises(RequestError) as caught:
        fetched(*args, **kwargs)
    error = caught.value
    assert (error.status, error.code) == (400, "invalid_image_url")
    assert error.param == "messages[1].content[0].image_url"
    return str(error)


def test_a_picture_comes(site, names, monkeypatch):
    """Without proxies, with the name in the Host header; chunks, redirects and data: addresses too."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    chunks = b"3\r\nGIF\r\n5\r\n89a12\r\n0\r\n\r\n"
    site.answers["/chunks"] = 200, {"transfer-encoding": "chunked"}, chunks
    site.answers["/1?x=%20y"] = 302, {"location": site.url("/2", "b.a.example")}, b""
    site.answers["/2"] = 307, {"location": "a.gif"}, b""
    data = "data:image/png;base64,AA=="
    urls = [site.url(host="A.Example."), site.url("/chunks"), site.url("/1?x=%20y"), data]
    assert fetched(*urls) == [PICTURE, b"GIF89a12", PICTURE, data]
    assert ("/a.gif", f"a.example:{site.server_port}") in site.asked


@pytest.mark.parametrize(
    ("patterns", "hosts", "others"),
    [
        (["a.example"], ["a.example"], ["b.a.example", "127.0.0.1"]),
        (["*.A.example"], ["b.a.example"], ["a.example", "127.0.0.1"]),
        (["127.0.0.1", "b.a.example"], ["127.0.0.1", "b.a.example"], ["a.example"]),
    ],
)
def test_hosts_that_are_allowed(site, names, patterns, hosts, others):
    for host in hosts:
        assert fetched(site.url(host=host), patterns=patterns) == [PICTURE]
    count = len(site.asked)
    for host in others:
        assert "no pictures from this host" in refused(site.url(host=host), patterns=patterns)
    site.answers["/to"] = 302, {"location": site.url(host=others[0])}, b""
    said = refused(site.url("/to", hosts[0]), patterns=patterns)
    assert "no pictures from this host" in said and len(site.asked) == count + 1


@pytest.mark.parametrize(
    "pattern", ["", "a.example:80", "http://a.example", "a*", "*a", "*.*", "a b"]
)
def test_patterns_that_are_none(pattern):
    with pytest.raises(UserInputError, match="host of pictures"):
        PictureFetcher([pattern])


def test_addresses_that_are_not_public(site, names):
    """Also after a redirect, in other spellings, and if only one of several is none."""
    host = "the host has no public address"
    for url in (site.url(host="127.0.0.2"), site.url(host="two.example"), site.url(host="no.example"),
                site.url(host="0x7f.2"), "http://[::1]/", "http://[::ffff:127.0.0.2]/"):  # fmt: skip
        assert host in refused(url)
    assert site.asked == []
    for there in (site.url(host="127.0.0.2"), "http://169.254.169.254/", "//[fe80::1]/"):
        site.answers["/to"] = 301, {"location": there}, b""
        assert host in refused(site.url("/to"))


NOT_PUBLIC = """
0.0.0.0 10.1.2.3 100.64.0.1 127.0.0.1 169.254.169.254 172.16.0.1 192.0.0.1 192.168.1.1 198.18.0.1 224.0.0.1
239.1.1.1 240.0.0.1 255.255.255.255 :: ::1 ::ffff:10.0.0.1 ::10.0.0.1 64:ff9b::a00:1 64:ff9b:1::1 2002:a00:1::
fc00::1 fe80::1 fec0::1 ff02::1 ff0e::1 2001:db8::1 2001::1
""".split()


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_an_address_that_is_not_public(address):
    assert not is_public(ip_address(address))


@pytest.mark.parametrize("address", ["1.1.1.1", "2606:4700::1111", "64:ff9b::101:101"])
def test_an_address_that_is_public(address):
    assert is_public(ip_address(address))


def test_the_usual_rule_refuses_this_machine(site):
    fetcher = PictureFetcher(["*"])
    chat = [{"role": "user", "content": [{"type": "image", "image": site.url()}]}]
    with pytest.raises(RequestError, match="no public address"):
        asyncio.run(fetcher.filled(chat))
    assert site.asked == []


def test_addresses_that_are_none(site):
    for url, says in {
        site.url().replace("://", "://me:secret@"): "password",
        site.url("/a b"): "not valid",
        site.url("/a\r\nx: y"): "not valid",
        "http://127.0.0.1\\@a.example/": "not valid",
        "http://127.0.0.1:99999/": "not valid",
        "http://[::1/": "not valid",
        "http:///a.gif": "from this host",
        f"http://{'a' * 70}.example/": "not valid",
        site.url("/" + "a" * 9000): "not valid",
    }.items():
        assert says in refused(url)
    for there, says in {
        "file:///etc/passwd": "begin with http",
        "ftp://127.0.0.1/": "begin with http",
    }.items():
        site.answers["/to"] = 302, {"location": there}, b""
        assert says in refused(site.url("/to"))


def test_redirects_have_a_number(site):
    for i in range(5):
        site.answers[f"/{i}"] = 302, {"location": f"/{i + 1}" if i < 4 else "/a.gif"}, b""
    assert fetched(site.url("/2")) == [PICTURE]
    assert "more than 3 times" in refused(site.url("/1"))
    assert [path for path, _ in site.asked] == ["/2", "/3", "/4", "/a.gif", "/1", "/2", "/3", "/4"]
    site.answers["/to"] = 302, {}, b""
    assert "nowhere" in refused(site.url("/to"))


def test_bytes_have_a_limit(site):
    """Of all pictures together, whether the length is told or not."""
    big = PICTURE + bytes(900)
    site.answers["/big"] = 200, {}, big
    site.answers["/long"] = (
        200,
        {"transfer-encoding": "chunked"},
        b"%x\r\n%s\r\n0\r\n\r\n" % (len(big), big),
    )
    limits = FetchLimits(size=1500)
    assert fetched(site.url("/big"), site.url("/big"), limits=limits) == [big, big]  # one address
    for path in ("/big", "/long"):
        assert "500 bytes" in refused(site.url(path), limits=FetchLimits(size=500))
        with pytest.raises(RequestError, match=r"content\[1\].* 1,050 bytes"):
            fetched(site.url(), site.url(path), limits=FetchLimits(size=1050))


def test_time_has_a_limit(site):
    """Of all, also of a host that sends a byte now and then."""
    site.answers["/slow"] = 200, {"content-length": "1000"}, [b"GIF89a", *[b"1"] * 40]
    began = time.monotonic()
    assert "within 0.5 seconds" in refused(site.url("/slow"), limits=FetchLimits(seconds=0.5))
    assert time.monotonic() - began < 5
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        assert "within 0.5 seconds" in refused(url, limits=FetchLimits(seconds=0.5))
        assert "within 0.5 seconds" in refused(
            url.replace("http", "https"), limits=FetchLimits(seconds=0.5)
        )


def test_what_comes_must_be_a_picture(site):
    site.answers |= {
        "/page": (200, {"content-type": "image/png"}, b"<html>a secret</html>"),
        "/none": (404, {}, PICTURE),
        "/cut": (200, {"content-length": "500"}, PICTURE),
        "/empty": (200, {}, b""),
        "/zip": (200, {"content-encoding": "gzip"}, b"\x1f\x8b" + bytes(30)),
    }
    said = {path: refused(site.url(path)) for path in ("/page", "/none", "/cut", "/empty", "/zip")}
    assert "is no picture" in said["/page"] and "secret" not in said["/page"]
    assert "status 404" in said["/none"] and "is no picture" in said["/zip"]
    with socket.create_server(("127.0.0.1", 0)) as other:
        url = f"http://127.0.0.1:{other.getsockname()[1]}/"

        def answer():
            connected, _ = other.accept()
            connected.recv(1000)
            connected.sendall(b"SSH-2.0-OpenSSH\r\n")
            connected.close()

        thread = threading.Thread(target=answer)
        thread.start()
        assert "does not answer as it should" in refused(url)
        thread.join()
    assert "does not answer as it should" in refused(url)  # it is closed


def test_certificates_are_checked(names, monkeypatch):
    site = Site(is_secure=True)
    try:
        url = site.url(host="a.example", scheme="https")
        assert "does not answer as it should" in refused(url)  # nobody has signed it
        trusted = ssl.create_default_context(cafile=PEM)
        monkeypatch.setattr(fetch, "_trusted", lambda: trusted)
        assert fetched(url) == [PICTURE]
        for host in ("b.a.example", "127.0.0.1"):
            assert "does not answer as it should" in refused(site.url(host=host, scheme="https"))
        assert "does not answer as it should" in refused(site.url(host="a.example"))  # not HTTP
        assert len(site.asked) == 1
    finally:
        closed(site)


def test_a_request_with_an_address(site, tmp_path):
    """The answer is that to the same picture in a data: address; without the option nothing is fetched."""
    PIL = pytest.importorskip("PIL.Image")
    data = io.BytesIO()
    PIL.fromarray(picture()).save(data, "png")
    site.answers["/a.png"] = 200, {}, data.getvalue()
    model, tokenizer = maxjax.load(write_model(tmp_path))
    with maxjax.Engine(model, tokenizer, slots=2) as engine:
        clients = []
        for hosts in (["127.0.0.1"], ()):
            server = Server("llava", image_hosts=hosts)
            if server.fetcher is not None:
                server.fetcher._is_public = lambda one: True
            server.use(model, tokenizer, engine)
            server.is_ready = True
            clients.append(TestClient(application(server)))
        client, without = clients
        options = {"max_tokens": 4, "temperature": 0}
        expected = str(engine.submit(asked(picture()), max_new_tokens=4, temperature=0).result())

        def ask(url, client=client, **fields):
            parts = [
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "text", "text": "w1 w2"},
            ]
            body = {
                "model": "llava",
                "messages": [{"role": "user", "content": parts}],
                **options,
                **fields,
            }
            return client.post("/v1/chat/completions", json=body)

        assert ask(site.url("/a.png")).json()["choices"][0]["message"]["content"] == expected
        streamed = ask(site.url("/a.png"), stream=True)
        assert streamed.status_code == 200 and "[DONE]" in streamed.text
        item = {"type": "input_image", "image_url": site.url("/a.png")}
        text = {"type": "input_text", "text": "w1 w2"}
        body = {
            "model": "llava",
            "input": [{"role": "user", "content": [item, text]}],
            "temperature": 0,
        }
        found = client.post("/v1/responses", json={**body, "max_output_tokens": 4}).json()
        assert found["output"][0]["content"][0]["text"] == expected
        for stream in (False, True):
            error = ask("http://127.0.0.2/a.png", stream=stream)
            assert error.status_code == 400
            assert error.json()["error"]["code"] == "invalid_image_url"
        assert ask("file:///etc/passwd").json()["error"]["code"] == "unsupported_parameter"
        count = len(site.asked)
        assert ask(site.url("/a.png"), without).json()["error"]["code"] == "unsupported_parameter"
        assert len(site.asked) == count
