"""One step: the inbox, what the policy ranks packed into a plan, what came of it booked."""
