"""Tables of judging drafts."""
