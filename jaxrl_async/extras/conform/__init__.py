"""The yardstick of servers: what a server of any kind is measured on, for the verb `conform` and for the tests."""
