"""The routes under /v1 and those for operators. Handlers parse, call the store or a function of the
library, and hand on the answer; each says by `access.need` who may call it.
"""
