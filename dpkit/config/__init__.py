"""The config: what a TOML file may say (`schema`), and how it is read (`load`)."""
