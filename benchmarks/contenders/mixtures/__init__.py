"""The same mixture of two sources, with this library and with others that mix, each as its documentation says."""
