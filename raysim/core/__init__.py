"""Pure foundations: errors, seeding, the flat layout, and the method record. No I/O, no Ray, no configuration."""
