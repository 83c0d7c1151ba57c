"""Files and flags to frozen dataclasses, and the policies that runs saved."""
