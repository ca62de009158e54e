"""Files of the ggml family; knows nothing of libllama."""
