//! Tests of the parts that the examples share, and of the documents that quote them.

mod documents;
mod double;
mod from_burn_train;
mod quicktour;
mod readme;
