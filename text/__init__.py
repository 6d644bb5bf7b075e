"""Text and token ids: tokenizers and detokenizers."""
