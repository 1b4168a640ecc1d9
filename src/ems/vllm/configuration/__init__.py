"""What people write into an engine's configuration and environment for the connector, and what it means."""
