"""Tables of norms, activations, rotary embedding, logits."""
