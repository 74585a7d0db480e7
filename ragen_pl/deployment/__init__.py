"""A trained policy behind the endpoint that it was trained with (`ragen_pl.serve`)."""
