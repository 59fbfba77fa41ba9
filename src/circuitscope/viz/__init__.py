"""Figures. Functions take runs or tables and return matplotlib objects; nothing opens a window."""
