"""The same documents packed into sequences, with this library and with others, each as its documentation says."""
