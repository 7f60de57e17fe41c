//! What is tracked, as the programs show it that people look with.

mod kills;
