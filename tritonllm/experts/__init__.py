"""How much work experts have, and which rank has which of them, as plain data. No torch."""
