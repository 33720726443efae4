"""What listens: the relay, what it reads beside the stream, and the admin API."""
