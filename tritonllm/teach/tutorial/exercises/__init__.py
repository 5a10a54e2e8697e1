"""Files with holes that learners fill in; they get a copy of the text."""
