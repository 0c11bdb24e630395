"""`kvreturn analyze`: from logs to a decision, before anything is deployed."""
