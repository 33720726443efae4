"""One module an API dialect: facts from a request, usage and timings from a reply."""
