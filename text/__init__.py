"""Text and token ids: tokenizers, detokenizers, chat templates and tool calls."""
