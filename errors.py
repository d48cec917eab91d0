"""What is wrong with a configuration, for those who must not import all of it: an exported model needs no Hydra."""


class ConfigError(ValueError):
    """Every problem of a configuration, one per line: the value, the rule it breaks and the fix."""

    def __init__(self, *problems: str):
        super().__init__(*problems)
        self.problems = list(problems)

    def __str__(self) -> str:
        return "invalid configuration:\n" + "\n".join(f"  - {problem}" for problem in self.problems)
