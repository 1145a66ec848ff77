//! What another user of the machine, or a pod that is not trusted, could try.

mod images;
