"""Pictures of requests: from the text of a body to the patches that a tower reads. Only the worker has Pillow."""
