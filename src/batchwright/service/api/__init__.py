"""The routes under /v1 and those for operators. A handler calls the store or a function of the
library and returns its answer; `access.need` says which scopes its caller needs.
"""
