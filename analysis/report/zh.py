CHINESE: dict[str, str] = {}
