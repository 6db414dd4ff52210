"""What predictions, draws, tables, pilots and shopping lists were, and a home that Srift wrote on 23 November 2026."""
