"""The hand-off from engine to engine: what people's settings mean, on a transport connector that vLLM ships."""
