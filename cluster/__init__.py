"""Launch files for clusters and the script that `ray submit` uploads. No logic here."""
