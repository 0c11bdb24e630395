"""The sections of the settings file, one module each; `kvreturn.config` puts them together."""
