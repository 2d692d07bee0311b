"""DLite Agent: an agent-loop server with history-free speculative decoding."""
