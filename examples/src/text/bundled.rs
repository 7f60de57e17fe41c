/// The text to learn from if the program is given none.
pub(super) const BUNDLED: &str = "\
The lighthouse keeper kept a book of every ship that passed. In the left column he wrote the hour, in \
the middle column the wind, and in the right column what he could see of the cargo. When the fog came he \
wrote only the sound of the horn, and how long it took to fade.\n\
In the winter there were days without a ship. Then he wrote down the gulls instead, and the colour of the \
water, and whether the lamp had needed oil. He said that a book with gaps is a book that nobody can trust, \
and so there were no gaps.\n\
One evening a second keeper came to share the work. They agreed that each would write every other hour, and \
that in the morning they would read to each other what the night had brought. At first the pages did not \
fit together: one counted the ships that came, the other the ships that went, and the sum of both was more \
than the sea could hold. So they sat down and agreed on what a ship is, when an hour ends, and who begins.\n\
From then on the two wrote one book. Nobody who read it later could tell which hand had held the pen, for \
every ship was there once, and only once, and in the order in which it had passed.\n\
When the old keeper was ill for a week, the other wrote alone, twice as much each night, and the book went \
on as if nothing had happened. And when a third keeper came they only had to divide the hours anew.\n\
The ships never knew. They saw a light that turned, and turned again, and was never late.\n";
