"""`kvreturn doctor`: looks at a deployment or its files, and says what to do."""
