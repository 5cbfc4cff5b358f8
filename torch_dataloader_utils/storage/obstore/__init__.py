"""Objects of S3 read by obstore, where that is safe: with which options, in which process, by which requests.

`urls.obstore_of` decides whether obstore reads some URLs. `s3.ObstoreS3` then stands in for fsspec's file system.
"""
