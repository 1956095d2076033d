"""Drawing the next token from logits."""
