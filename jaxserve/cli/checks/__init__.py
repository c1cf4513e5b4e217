"""The checks of `jaxserve doctor`."""
