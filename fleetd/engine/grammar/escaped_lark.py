def escaped_lark(lark: str) -> str:
    raise ValueError("todo")
