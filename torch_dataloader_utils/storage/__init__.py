"""Files listed, opened and read through fsspec, with secrets kept out of messages.

It imports only `errors`. Paths enter at `listing.list_files`; bytes leave at `filesystem.Storage`.
"""
