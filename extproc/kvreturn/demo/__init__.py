"""`kvreturn demo`: one agent conversation, with and without read-back, and on a plain node."""
