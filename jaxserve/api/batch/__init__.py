"""Run OpenAI batches on the server's own routes.

A *batch request* is one line of a batch's input file: one request, which the route that the line names answers.
"""
