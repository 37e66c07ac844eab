-- What holds for every row of the hot tables, as constraints. They are no part of the schema, because each costs as much as a
-- look-up in every statement; the tests of this package run with them.

-- name: invariants
ALTER TABLE fairlane.tally ADD CHECK (class BETWEEN 0 AND 2);
ALTER TABLE fairlane.job
    ADD CHECK (class BETWEEN 0 AND 2),
    ADD CHECK (kind BETWEEN 0 AND 3),
    ADD CHECK (cost > 0),
    ADD CHECK (retries >= 0);
ALTER TABLE fairlane.live
    ADD CHECK (class BETWEEN 0 AND 2),
    ADD CHECK (state BETWEEN 0 AND 3),
    ADD CHECK (gate BETWEEN 0 AND 4),
    ADD CHECK (flow IS NULL OR (state >= 2 AND gate = 0 AND arrival IS NOT NULL)),
    ADD CHECK (session IS NULL OR state = 3);
ALTER TABLE fairlane.outcome
    ADD CHECK (state BETWEEN 4 AND 6),
    ADD CHECK ((session IS NULL) = (move IS NULL));
ALTER TABLE fairlane.pace ADD CHECK ((tag IS NULL) = (head IS NULL));
ALTER TABLE fairlane.load ADD CHECK (least(running_high, running_normal, running_low) >= 0);
