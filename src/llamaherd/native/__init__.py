"""libllama by ctypes: the only folder where a pointer is made."""
