"""What the HTML reports of `analyze` and `bench` share."""
