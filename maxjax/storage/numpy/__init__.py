"""NumPy files: ``npy`` headers, and ``npz`` archives of them. Nothing is unpickled."""
