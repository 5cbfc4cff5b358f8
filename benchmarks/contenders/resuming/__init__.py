"""The same files, read by this library and by others that are resumed, each as its documentation says."""
