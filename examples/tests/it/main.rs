//! Tests of the parts that the examples share, and of the documents that quote them.

mod double;
mod quicktour;
mod readme;
