-- Schedules as applications declare them.

-- Store schedules; a changed timetable starts over.
CREATE FUNCTION fairlane.declare(p_names text[], p_timetables text[], p_jobs bytea[], p_now double precision DEFAULT NULL,
    p_lease double precision DEFAULT NULL, OUT topics text[])
LANGUAGE plpgsql AS $$
DECLARE
    m fairlane.moment := fairlane.moment_of(p_now, p_lease);
BEGIN
    -- The last one of each name counts. Inserted in the order of names, so that concurrent calls do not deadlock.
    INSERT INTO fairlane.schedule AS s (name, timetable, job, stored_at, declared_at)
    SELECT DISTINCT ON (g.name) g.name, g.timetable, g.job, m.now, m.now
    FROM unnest(p_names, p_timetables, p_jobs) WITH ORDINALITY g(name, timetable, job, ord) ORDER BY g.name, g.ord DESC
    ON CONFLICT (name) DO UPDATE SET job = excluded.job, declared_at = excluded.declared_at, timetable = excluded.timetable,
        stored_at = CASE s.timetable WHEN excluded.timetable THEN s.stored_at ELSE excluded.stored_at END;
    topics := '{}';
END $$;
