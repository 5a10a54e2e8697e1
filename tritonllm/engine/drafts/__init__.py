"""What guesses tokens on the device: a draft model, an EAGLE head, trees of drafts."""
