"""What the two loops share: the queue that carries groups forward, the store that carries weights back."""
