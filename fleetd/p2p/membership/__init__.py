"""Who belongs to the fleet, what each member says of itself, and how both are kept and passed on."""
