"""Text and token ids: tokenizers, detokenizers and chat templates."""
