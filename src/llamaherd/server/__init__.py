"""HTTP at the edge: translate, never compute. Nothing in here loads libllama."""
